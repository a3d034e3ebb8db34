"""The process in which one system runs: it does what it is told over a socket, and answers in lines of JSON.

python runner.py DESCRIPTOR WORKLOAD PEER INDEX NUM_ENVS NUM_PROCESSES
"""

import importlib
import json
import os
import socket
import sys
import time
import warnings
from dataclasses import asdict
from typing import IO, Any

import processes
from peers import PEERS, load
from systems import Driver, Job, Unsupported
from workloads import find_workload

__all__ = ["main"]


def start(peer: str, index: int, job: Job) -> tuple[Driver, dict[str, Any]]:
    """Make a driver and let it take its first step."""
    system = load(peer)[index]
    for module in PEERS[peer].imports:  # as the caller would have, before the clock runs
        importlib.import_module(module)
    before, began = processes.open_descriptors("self"), time.perf_counter()
    driver = system.start(job)
    driver.step()
    return driver, asdict(processes.start_up_of(time.perf_counter() - began, before))


def turn(driver: Driver, warm_up: float, seconds: float) -> dict[str, float]:
    """Warm up and let the driver have a turn."""
    driver.turn(warm_up)
    cpu = time.process_time()
    steps, elapsed = driver.turn(seconds)
    return {"steps": steps, "seconds": elapsed, "cpu": time.process_time() - cpu}


def serve(peer: str, index: int, job: Job, commands: IO[str], replies: IO[str]) -> None:
    """Start the system and give it turns until there are no more commands."""

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        driver, started = start(peer, index, job)
        reply({"started": started})
        for line in commands:
            command = json.loads(line)
            if command == "close":
                break
            reply({"turn": turn(driver, *command)})
        driver.close()
        reply({"closed": True})
    except Unsupported as reason:
        reply({"unsupported": str(reason)})
    except BaseException as error:
        reply({"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        raise


def main() -> None:
    """Serve whoever started this process."""
    descriptor, workload, peer, index, num_envs, num_processes = sys.argv[1:]
    warnings.simplefilter("ignore")
    processes.adopt_orphans()
    processes.end_with_parent()
    os.set_inheritable(int(descriptor), False)
    sock = socket.socket(fileno=int(descriptor))
    job = Job(find_workload(workload), int(num_envs), int(num_processes))
    with sock, sock.makefile("r") as commands, sock.makefile("w") as replies:
        serve(peer, int(index), job, commands, replies)


if __name__ == "__main__":
    main()
