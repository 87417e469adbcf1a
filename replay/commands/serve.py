"""The command `moe-replay serve`: an OpenAI-compatible server in front of a model whose experts are behind a cache."""

import ipaddress
import signal
import socket
from contextlib import suppress
from types import FrameType
from typing import Annotated

import transformers
import typer
import uvicorn

from replay.commands.device_options import Live
from replay.commands.live_options import LiveOptions
from replay.live.server import Generation, application
from sim.commands import options
from sim.quantities import show_bytes
from terminal import console
from traces.errors import InputError, refuse

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the server, unless what started it ignores them, as `nohup` does a closed terminal's SIGHUP."""

GRACE_S = 3  # after a signal, how long clients have to read what is left of their answers
USED = 0.5
"""Of the memory that is free, what a request may be stated to take.

Where all tokens chose the same experts, and allocators kept parts of what was freed, 1.3 times as much was measured.
"""

LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Names by which browsers and clients on this computer may reach a server that listens on it alone."""


def serve(
    *,
    opened: LiveOptions,
    on: Live,
    host: Annotated[str, typer.Option(help="Address to listen at; beyond this computer it needs --api-key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="MOE_REPLAY_API_KEY", help="What clients must send as their API key.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer. Default: the model's, if memory suffices.")
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model whose experts are behind a cache to clients of OpenAI's interface.

    Chat completions and completions, streaming too; what was done in Prometheus' format at /metrics.

    [b]moe-replay serve --model ~/models/OLMoE-1B-7B --cache-size 8GiB[/b]
    """
    is_local = host == "localhost"
    with suppress(ValueError):
        is_local = ipaddress.ip_address(host).is_loopback
    refuse(
        (api_key is not None and not api_key.strip(), "--api-key is empty: name a key, or leave the option out"),
        (
            api_key is None and not is_local,
            f"--host {host} can be reached from elsewhere: say with --api-key what clients must send",
        ),
    )
    transformers.logging.set_verbosity_error()
    try:  # clients wait from now on until they are served
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(f"cannot listen at --host {host}, --port {port}: {error}; choose others") from error
    with listening, opened.live(on, quiet) as live:
        for note in live.loaded.notes:
            console.warn(note)
        free, longest = live.free_bytes(), live.loaded.context or 1 << 30
        context = min(longest, max_context or longest, live.memory.longest(int(USED * free)))
        beside = f"; {show_bytes(free)} are free beside the model and its cache"
        refuse((context < 2, f"no request fits into memory{beside}: choose a smaller --cache-size"))
        generation = Generation(live, context)
        app = application(generation, api_key, (host, *LOCAL) if is_local else ("*",))
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=GRACE_S)
        )

        def end(sig: int, frame: FrameType | None) -> None:
            generation.stop()
            uvicorn.Server.handle_exit(server, sig, frame)

        server.handle_exit = end  # type: ignore[method-assign]
        for number in ENDS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, end)  # uvicorn raises it again at its end, where the default would be a kill
        if not quiet:
            at = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1"
            bent = f", not lossless: {opened.routing}" if opened.routing else ""
            console.note(f"serving {live.loaded.name} at {at}, a context of {context:,} tokens{bent}")
            console.note(live.memory.sentence(context, live.device.peak_bytes()) + beside)
        try:
            server.run([listening])
        finally:
            generation.close()
        if not quiet:
            console.note("stopped serving: requests that ran have ended")
