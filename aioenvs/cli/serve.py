"""``aioenvs serve``: a server of envs, each connection with a session of its own."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioenvs.cli.targets import EXIT_USAGE, CommandError, describe_failure, factory_named

if TYPE_CHECKING:
    from aioenvs.serving.sessions import Sessions

__all__ = ["ServeOptions", "serve"]


@dataclass
class ServeOptions:
    """The options of ``aioenvs serve``."""

    target: str
    num_envs: int = 64
    num_processes: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    idle_seconds: float = 60.0
    max_waiting: int = 256
    max_steps: int | None = None
    max_seconds: float | None = None
    step_seconds: float | None = None
    drain_seconds: float = 10.0
    token_env: str | None = None
    allow_origin: list[str] = field(default_factory=list)
    insecure: bool = False
    render: bool = False


def serve(options: ServeOptions) -> int:
    """Serve until a signal ends it.

    Raises:
        CommandError: If what it needs is missing, the envs cannot be made, or it would be open to everybody.
    """
    token = _token(options)
    try:
        from aioenvs.serving.app import create_app
    except ImportError as error:
        raise CommandError(
            f"serving needs packages that cannot be imported ({error}); to install them: pip install 'aioenvs[serve]'",
            EXIT_USAGE,
        ) from error
    factory: Any = factory_named(options.target)
    if options.render:
        if callable(factory):
            raise CommandError("--render is for Gymnasium ids; a factory renders as it likes", EXIT_USAGE)
        kwargs = {"render_mode": "rgb_array"}
    else:
        kwargs = {}
    app = create_app(
        factory,
        options.num_envs,
        token=token,
        allow_origins=options.allow_origin,
        any_host=options.insecure,
        kwargs=kwargs,
        num_processes=options.num_processes,
        idle_seconds=options.idle_seconds,
        max_waiting=options.max_waiting,
        max_steps=options.max_steps,
        max_seconds=options.max_seconds,
        step_seconds=options.step_seconds,
        close_timeout=max(0.5, 0.3 * options.drain_seconds),
    )
    return _run(app, app.sessions, options)


def _token(options: ServeOptions) -> str | None:
    if options.token_env is not None:
        token = os.environ.get(options.token_env, "")
        if not token:
            raise CommandError(
                f"--token-env {options.token_env}: there is no such variable, or it is empty", EXIT_USAGE
            )
        return token
    if not options.insecure and not _is_local(options.host):
        raise CommandError(
            f"--host {options.host} lets anybody who reaches it in; name the variable that has a token with "
            "--token-env, or say --insecure",
            EXIT_USAGE,
        )
    return None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _run(app: Any, sessions: Sessions, options: ServeOptions) -> int:
    import uvicorn

    logging.getLogger("uvicorn.error").addFilter(_no_refusal)

    class Server(uvicorn.Server):
        """A server that lets sessions come to their end before it closes them."""

        async def shutdown(self, sockets: Any = None) -> None:
            draining = asyncio.ensure_future(sessions.drain(0.5 * options.drain_seconds))
            while not draining.done() and not self.force_exit:
                await asyncio.wait([draining], timeout=0.1)
            draining.cancel()
            await super().shutdown(sockets)

    server = Server(
        uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            lifespan="on",
            log_level="info",
            access_log=False,
            server_header=False,
            ws_max_size=1 << 20,
            ws_per_message_deflate=False,  # which costs more than it saves where messages are short
            ws_ping_interval=20.0,
            timeout_graceful_shutdown=max(1, round(0.2 * options.drain_seconds)),
            limit_concurrency=None,
        )
    )
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    except Exception as error:
        raise CommandError(describe_failure(error)) from error
    return 0 if server.started else 1


def _no_refusal(record: logging.LogRecord) -> bool:
    """Tell whether a record is none: uvicorn complains of a handshake that ends with an HTTP status, as with 401."""
    return "without completing handshake" not in record.getMessage()
