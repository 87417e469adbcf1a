"""The command `moe-replay serve`: an OpenAI-compatible server in front of a model whose experts are behind a cache."""

import ipaddress
from functools import partial
from typing import Annotated

import typer

from replay.commands.device_options import Live
from replay.commands.live_options import LiveOptions
from replay.live.requests import unused
from replay.live.server import MAX_BATCH, Listener, Server, listen
from sim.commands import options
from sim.commands.printed import progress
from terminal import console
from traces.errors import InputError


def serve(
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a model. Default: the shipped one.")] = None,
    opened: LiveOptions = LiveOptions(),  # noqa: B008  its fields are the options
    *,
    on: Live,
    host: Annotated[str, typer.Option(help="Address to listen at; beyond this computer it needs --api-key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="MOE_REPLAY_API_KEY", help="What clients must send as their API key.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer. Default: the model's.")
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, max=1_000, help="Requests that are answered at a time; each has a KV cache.")
    ] = MAX_BATCH,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model whose experts are behind a cache to clients of OpenAI's interface.

    Chat completions and completions, streaming too; what was done in Prometheus' format at /metrics.

    [b]moe-replay serve --model ~/models/OLMoE-1B-7B --cache-size 8GiB[/b]
    """
    if api_key is None and not _is_loopback(host):
        raise InputError(f"--host {host} can be reached from elsewhere: say with --api-key what clients must send")
    opened.require_apart(on.get("store"))
    with (
        listen(host, port) as socket,
        opened.live(model, on, opened.policy, partial(progress, quiet=quiet, what="experts")) as live,
    ):
        for note in live.loaded.notes:
            console.warn(note)
        if names := unused(live.loaded.model.generation_config):
            console.warn(f"{live.loaded.name}: of its generation config, {', '.join(names)} will not be used")
        server = Server(live, api_key, max_context, max_batch)

        if not quiet:
            at = f"http://{f'[{host}]' if ':' in host else host}:{socket.getsockname()[1]}/v1"
            context, longest = server.context, server.longest_answer
            limit = f", answers of at most {longest:,}" if longest < context else ""
            console.note(f"serving {live.loaded.name} at {at}, a context of {context:,} tokens{limit}")
            console.note(live.memory.sentence(server.context, live.device.peak_bytes(), max_batch))
        try:
            Listener(server.app, server.worker.refuse).run([socket])
        finally:
            server.worker.close()
        if not quiet:
            console.note("stopped serving: requests that ran have ended")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
