"""Coroutines run from synchronous code: in the calling thread, in a thread of the portal's own, and interrupted."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from aioenvs.engine.portal import Immediate, LoopPortal, loop_wanted
from aioenvs.errors import ConcurrencyError

PRELUDE = """
import asyncio, os, signal
from aioenvs.engine.portal import LoopPortal
signal.signal(signal.SIGINT, signal.default_int_handler)
portal = LoopPortal()

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

async def identity(value):
    await asyncio.sleep(0)
    return value

def attempt(coroutine):
    try:
        print("returned", portal.run(coroutine), flush=True)
    except BaseException as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture
def portal() -> Iterator[LoopPortal]:
    portal = LoopPortal()
    yield portal
    portal.close()


async def identity(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


async def failing() -> None:
    await asyncio.sleep(0)
    raise KeyError("lost")


async def current_thread() -> threading.Thread:
    return threading.current_thread()


async def inside_a_loop(call: Callable[[], Any]) -> Any:
    """A plain call where a loop runs, as in a notebook or a server."""
    return call()


def portal_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aioenvs-portal"]


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call returns or raises in another thread."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return outcome[0]


# -- in the calling thread ------------------------------------------------------------------------------


def test_a_result_is_returned(portal: LoopPortal) -> None:
    assert portal.run(identity(3)) == 3
    assert portal.run(current_thread()) is threading.current_thread()
    assert portal_threads() == []


def test_an_exception_is_raised_and_the_portal_goes_on(portal: LoopPortal) -> None:
    with pytest.raises(KeyError, match="lost"):
        portal.run(failing())
    assert portal.run(identity(4)) == 4


def test_a_coroutine_that_was_cancelled_by_itself_says_so(portal: LoopPortal) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        portal.run(cancelled())


def test_a_coroutine_that_is_cancelled_before_its_first_turn(portal: LoopPortal) -> None:
    async def leave_a_callback() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])

    portal.run(leave_a_callback())
    with pytest.raises(asyncio.CancelledError):
        portal.run(asyncio.sleep(60))
    assert portal.run(asyncio.sleep(0, "and goes on")) == "and goes on"


def test_a_stop_of_the_loop_is_no_end_of_a_call(portal: LoopPortal) -> None:
    async def stopping() -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "the end"

    assert portal.run(stopping()) == "the end"


def test_all_coroutines_see_the_same_loop(portal: LoopPortal) -> None:
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert portal.run(loop()) is portal.run(loop())


def test_tasks_go_on_between_calls(portal: LoopPortal) -> None:
    async def begin() -> asyncio.Task[int]:
        return asyncio.create_task(identity(5))

    async def finish(task: asyncio.Task[int]) -> int:
        return await task

    assert portal.run(finish(portal.run(begin()))) == 5


def test_threads_may_take_turns(portal: LoopPortal) -> None:
    assert portal.run(identity(1)) == 1
    assert in_thread(lambda: portal.run(identity(2))) == 2
    assert portal.run(identity(3)) == 3


def test_a_call_during_a_call_is_refused(portal: LoopPortal) -> None:
    async def again() -> None:
        portal.run(identity(1))

    with pytest.raises(ConcurrencyError, match="in the middle of a call"):
        portal.run(again())
    assert portal.run(identity(2)) == 2


def test_a_call_from_another_thread_during_a_call_is_refused(portal: LoopPortal) -> None:
    entered, leave = threading.Event(), threading.Event()

    async def wait() -> str:
        entered.set()
        await asyncio.to_thread(leave.wait)
        return "undisturbed"

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(portal.run(wait())))
    thread.start()
    entered.wait()
    with pytest.raises(ConcurrencyError, match="in the middle of a call from another thread; let that end first"):
        portal.run(identity(1))
    leave.set()
    thread.join()
    assert results == ["undisturbed"]

    async def shut_down() -> None:
        await asyncio.get_running_loop().shutdown_default_executor()

    portal.run(shut_down())


@pytest.mark.parametrize("threaded", [False, True])
def test_a_key_pressed_before_there_is_something_to_cancel_is_not_lost(
    portal: LoopPortal, monkeypatch: pytest.MonkeyPatch, threaded: bool
) -> None:
    ended = []

    async def wait() -> None:
        await asyncio.sleep(20)  # which nobody waits for, unless the key is lost
        ended.append(True)

    if threaded:
        asyncio.run(inside_a_loop(lambda: portal.run(identity(1))))
    name = "call_soon_threadsafe" if threaded else "create_task"
    original = getattr(portal._loop, name)

    def press(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(portal._loop, name, press)
    with pytest.raises(KeyboardInterrupt):
        portal.run(wait())
    assert ended == []
    assert portal.run(identity(2)) == 2


# -- where a loop runs already --------------------------------------------------------------------------


async def test_inside_a_running_loop_the_portal_gets_a_thread(portal: LoopPortal) -> None:
    (thread,) = [portal.run(current_thread())]
    assert thread is not threading.current_thread()
    assert portal_threads() == [thread]
    assert portal.run(identity(3)) == 3
    with pytest.raises(KeyError, match="lost"):
        portal.run(failing())


def test_from_then_on_it_stays_in_that_thread(portal: LoopPortal) -> None:
    task = portal.run(identity(1))
    assert task == 1
    thread = asyncio.run(inside_a_loop(lambda: portal.run(current_thread())))
    assert portal.run(current_thread()) is thread
    assert in_thread(lambda: portal.run(current_thread())) is thread


async def test_a_call_from_the_portals_own_thread_is_refused(portal: LoopPortal) -> None:
    async def again() -> None:
        portal.run(identity(1))

    with pytest.raises(ConcurrencyError, match="from inside the envs' own event loop"):
        portal.run(again())
    assert portal.run(identity(2)) == 2


async def test_calls_from_several_threads_share_the_portals_thread(portal: LoopPortal) -> None:
    portal.run(identity(0))
    first, second = asyncio.Event(), asyncio.Event()

    async def meet(mine: asyncio.Event, other: asyncio.Event) -> str:
        mine.set()
        await other.wait()
        return "met"

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(portal.run(meet(first, second))))
    thread.start()
    assert portal.run(meet(second, first)) == "met"
    thread.join()
    assert results == ["met"]


# -- close ----------------------------------------------------------------------------------------------


def test_close_ends_the_loop() -> None:
    portal = LoopPortal()
    portal.run(identity(1))
    portal.close()
    assert portal._loop.is_closed()


def test_a_portal_that_was_never_used_can_be_closed() -> None:
    portal = LoopPortal()
    portal.close()
    assert portal._loop.is_closed()


async def test_close_ends_the_thread_and_the_loop() -> None:
    portal = LoopPortal()
    portal.run(identity(1))
    portal.close()
    assert portal_threads() == []
    assert portal._loop.is_closed()


@pytest.mark.parametrize("used", [True, False])
def test_close_inside_a_running_loop_of_a_portal_without_a_thread(used: bool) -> None:
    portal = LoopPortal()
    try:
        if used:
            portal.run(identity(1))
        asyncio.run(inside_a_loop(portal.close))
        assert portal._loop.is_closed()
    finally:
        if not portal._loop.is_closed():
            portal.close()


async def test_close_in_the_portals_own_thread_as_garbage_collection_may_do() -> None:
    portal = LoopPortal()
    portal.run(identity(1))
    (thread,) = portal_threads()
    portal._loop.call_soon_threadsafe(portal.close)
    thread.join()
    try:
        assert portal._loop.is_closed()
    finally:
        portal._loop.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_close_twice(threaded: bool) -> None:
    portal = LoopPortal()
    if threaded:
        asyncio.run(inside_a_loop(lambda: portal.run(identity(1))))
    portal.close()
    portal.close()
    assert portal_threads() == []


# -- Ctrl-C ---------------------------------------------------------------------------------------------


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """A SIGINT handler of the user's own, and what it was called with."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGINT, handler)
    yield received
    signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_users_own_is_left_alone(portal: LoopPortal, handled: list[int]) -> None:
    own = signal.getsignal(signal.SIGINT)

    async def interrupted() -> tuple[str, Any]:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return "went on", signal.getsignal(signal.SIGINT)

    assert portal.run(interrupted()) == ("went on", own)
    assert handled == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("coroutine", [identity, lambda _: failing()])
def test_the_default_handler_is_replaced_during_a_call_only(portal: LoopPortal, coroutine: Callable[..., Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen: list[Any] = []

    async def look() -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        await coroutine(1)

    with contextlib.suppress(KeyError):
        portal.run(look())
    assert seen != [signal.default_int_handler]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def script(code: str) -> list[str]:
    """The lines that a script prints, of which each runs a portal in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + code], capture_output=True, text=True, timeout=30
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.split("\n")[:-1]


def test_an_interrupt_cancels_the_coroutine_and_is_raised_once() -> None:
    lines = script("""
async def waiting():
    asyncio.get_running_loop().call_soon(interrupt)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("cleaned up", flush=True)

attempt(waiting())
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
attempt(identity(1))
portal.close()
""")
    assert lines == ["cleaned up", "KeyboardInterrupt", "True", "returned 1"]


def test_an_interrupt_from_outside_wakes_a_loop_that_sleeps() -> None:
    code = (
        PRELUDE
        + """
async def waiting():
    print("ready", flush=True)
    await asyncio.Event().wait()

attempt(waiting())
attempt(identity(1))
portal.close()
"""
    )
    with subprocess.Popen([sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "KeyboardInterrupt\nreturned 1\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    "race",
    [
        "    return 1",
        "    try:\n        await asyncio.Event().wait()\n    except asyncio.CancelledError:\n        return 1",
    ],
    ids=["ends first", "swallows the cancellation"],
)
def test_an_interrupt_arrives_also_where_the_coroutine_still_ends_well(race: str) -> None:
    lines = script(f"""
async def quick():
    interrupt()
{race}

attempt(quick())
attempt(identity(2))
portal.close()
""")
    assert lines == ["KeyboardInterrupt", "returned 2"]


def test_a_second_interrupt_does_not_wait_for_a_coroutine_that_refuses_to_end() -> None:
    lines = script("""
async def stubborn():
    asyncio.get_running_loop().call_soon(interrupt)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        asyncio.get_running_loop().call_soon(interrupt)
        await asyncio.Event().wait()
    finally:
        print("ended", flush=True)

attempt(stubborn())
attempt(identity(1))
portal.close()
""")
    assert lines == ["ended", "KeyboardInterrupt", "returned 1"]


def test_an_interrupt_of_a_call_into_the_portals_thread_ends_the_coroutine_first() -> None:
    lines = script("""
async def waiting():
    asyncio.get_running_loop().call_later(0.05, interrupt)  # by then the caller waits
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.05)
        print("cleaned up", flush=True)

async def notebook():
    attempt(identity(0))
    attempt(waiting())
    attempt(identity(1))

loop = asyncio.new_event_loop()
loop.run_until_complete(notebook())
loop.close()
portal.close()
""")
    assert lines == ["returned 0", "cleaned up", "KeyboardInterrupt", "returned 1"]


# -- without a loop -------------------------------------------------------------------------------------


def test_immediate_runs_what_never_suspends() -> None:
    async def inner() -> int:
        return 3

    async def outer() -> int:
        return await inner() + 1

    portal = Immediate()
    assert portal.run(outer()) == 4
    portal.close()


async def test_immediate_needs_no_loop_and_minds_none() -> None:
    async def three() -> int:
        return 3

    assert Immediate().run(three()) == 3


def test_immediate_raises_what_the_coroutine_raises() -> None:
    async def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        Immediate().run(fail())


def test_immediate_refuses_to_wait() -> None:
    ended = []

    async def suspends() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    with pytest.raises(TypeError, match="use AsyncSerialEnv"):
        Immediate().run(suspends())
    assert ended == [True]


# -- from no loop to one --------------------------------------------------------------------------------


@pytest.fixture
def immediate() -> Iterator[Immediate]:
    portal = Immediate()
    yield portal
    portal.close()


async def later(value: int) -> int:
    await loop_wanted()
    await asyncio.sleep(0)
    return value


def test_a_loop_is_there_where_one_is_wanted(immediate: Immediate) -> None:
    assert immediate.run(later(3)) == 3
    assert immediate.run(identity(4)) == 4  # from then on

    async def running() -> Any:
        return asyncio.get_running_loop()

    assert immediate.run(running()) is immediate.run(running())
    assert not immediate.foreign


async def test_a_loop_that_is_wanted_inside_another(immediate: Immediate) -> None:
    async def loop() -> Any:
        await loop_wanted()
        return asyncio.get_running_loop()

    assert immediate.run(loop()) is not asyncio.get_running_loop()


def test_the_rest_of_a_coroutine_raises_and_is_cancelled_like_a_whole_one(immediate: Immediate) -> None:
    seen = []

    async def fail() -> None:
        await loop_wanted()
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("late")
        await asyncio.sleep(0)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        immediate.run(fail())
    assert seen == ["late"]


async def test_system_exit_in_the_portals_thread_is_the_callers() -> None:
    portal = LoopPortal()

    async def leave() -> None:
        await asyncio.sleep(0)
        raise SystemExit(4)

    with pytest.raises(SystemExit) as caught:
        portal.run(leave())
    assert caught.value.code == 4
    assert portal.run(identity(5)) == 5
    portal.close()
