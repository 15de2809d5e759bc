"""``kvnode serve``: its options, and what they mean together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from node.cli_mlx_lm import options_of_mlx_lm, speak_of_mlx_lm
from node.config import (
    LEASE_S,
    VOLUME_WORST_S,
    Address,
    ServeConfig,
    default_data_dir,
    fault_order,
    let_grpc_speak,
)
from node.dataplane.options import PlaneAddress, PlaneOptions, parse_towards
from node.errors import UsageError
from node.http.options import DRAIN_S, HttpOptions
from node.serving.options import (
    CACHE_BYTES,
    MAX_TOKENS,
    REMOTE_TOKENS_MIN,
    SLOTS,
    SLOTS_MAX,
    AnswerDefaults,
    ContextPolicy,
    PrefillAt,
    ServingOptions,
)
from node.stores import parse_root

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_FILE: Final = click.Path(path_type=Path, dir_okay=False)

#: What mlx_lm.server listens on.
HOST: Final = "127.0.0.1"
PORT: Final = 8080

#: No template that ships with a model is near it.
_TEMPLATE_BYTES_MAX: Final = 1 << 20

#: Units that mlx_lm.server reads in sizes.
_UNITS: Final = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
}


class _Bytes(click.ParamType[int]):
    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().upper().removesuffix("B")
        number = text.rstrip("KMGI")
        unit = text[len(number) :]
        try:
            return int(float(number) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            self.fail(f"{value!r}: expected bytes such as 2GB or 512MiB", param, ctx)


def _several(options: list[Callable[[_Command], _Command]]) -> Callable[[_Command], _Command]:
    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


#: Names and defaults of mlx_lm.server, where they mean the same.
_MLX_LM: Final = _several(
    [
        click.option("--model", type=_FOLDER, help="Model folder; default: the one that ships."),
        click.option("--host", help=f"Where to listen for HTTP; default: {HOST}."),
        click.option(
            "--port", type=click.IntRange(0, 65_535), help=f"Port for HTTP; default: {PORT}."
        ),
        click.option(
            "--allowed-origins",
            metavar="ORIGIN,...",
            default="",
            help="Web pages that may call, or *; default: only the node's own.",
        ),
        click.option("--temp", default=0.0, show_default=True, type=click.FloatRange(0.0, 100.0)),
        click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0.0, 1.0)),
        click.option("--top-k", default=0, show_default=True, type=click.IntRange(0)),
        click.option("--min-p", default=0.0, show_default=True, type=click.FloatRange(0.0, 1.0)),
        click.option(
            "--max-tokens", default=MAX_TOKENS, show_default=True, type=click.IntRange(1),
            help="Tokens of an answer whose request names no number.",
        ),
        click.option(
            "--chat-template", type=str, default="",
            help="A template to be used instead of the model's own: its text, or a file of it.",
        ),
        click.option(
            "--log-level", default="INFO", show_default=True,
            type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]),
        ),
        click.option(
            "--prompt-cache-bytes", "--cache-bytes", "cache_bytes", type=_Bytes(),
            default=CACHE_BYTES, metavar="SIZE", help="Rows kept in memory; default: 1 GiB.",
        ),
    ]
)  # fmt: skip

#: What a node has to be given that others reach over gRPC.
_NEEDED: Final = {
    "data_dir": "--data-dir DIR, a folder of its own",
    "credentials": "--credentials DIR, which kvnode enroll or kvnode pair makes",
    "directory": "--directory URL, the same one as its peers, such as sqlite:PATH",
}

#: What only this server has.
_SERVING: Final = _several(
    [
        click.option(
            "--slots", default=SLOTS, show_default=True, type=click.IntRange(1, SLOTS_MAX),
            help="Answers that are computed in turn.",
        ),
        click.option(
            "--context-policy", default=ContextPolicy.SHIFT.value, show_default=True,
            type=click.Choice([policy.value for policy in ContextPolicy]),
            help="A conversation that is too long loses its oldest turns, or is refused.",
        ),
        click.option("--max-context", type=click.IntRange(1), help="Tokens; default: the model's."),
        click.option(
            "--keep", "keep_tokens", default=0, show_default=True, type=click.IntRange(0),
            help="First tokens of a raw prompt that a shift keeps.",
        ),
        click.option("--api-key-file", type=_FILE, help="Made by: kvnode apikey add."),
        click.option("--tls-cert", type=_FILE, help="PEM chain for HTTPS."),
        click.option("--tls-key", type=_FILE, help="Its key, readable by its owner alone."),
        click.option(
            "--quota-calls", type=click.IntRange(1), help="Calls of one tenant under way at once."
        ),
        click.option(
            "--quota-tokens", type=click.IntRange(1),
            help="Tokens a minute that may be computed for one tenant.",
        ),
        click.option("--slot-save-path", type=_FOLDER, help="Folder for /slots to save in."),
        click.option(
            "--prefill", default=PrefillAt.LOCAL.value, show_default=True,
            type=click.Choice([place.value for place in PrefillAt]),
            help="Where long prompts are computed.",
        ),
        click.option("--producer", metavar="NAME@HOST:PORT", help="The node that computes them."),
        click.option(
            "--remote-min-tokens", default=REMOTE_TOKENS_MIN, show_default=True,
            type=click.IntRange(1), help="Prompts with fewer new tokens stay here.",
        ),
        click.option(
            "--drain", default=DRAIN_S, show_default=True, metavar="SECONDS",
            type=click.FloatRange(0.0, 3600.0), help="How long answers may go on at a stop.",
        ),
    ]
)  # fmt: skip

_NODE: Final = _several(
    [
        click.option("--grpc", "address", metavar="HOST:PORT", help="Where to listen for gRPC."),
        click.option(
            "--advertise", metavar="HOST:PORT",
            help="Where other nodes reach this one; default: --grpc. Needed for 0.0.0.0.",
        ),
        click.option(
            "--kv-bytes", type=_Bytes(), metavar="SIZE",
            help="KV memory for sessions, by which they are placed; default: half of the machine.",
        ),
        click.option(
            "--data-dir", type=_FOLDER,
            help="This node's own files; default: a folder for each model in your home.",
        ),
        click.option("--credentials", type=_FOLDER, help="Folder made by enroll; --grpc needs it."),
        click.option(
            "--directory", metavar="URL",
            help="Who owns what: sqlite:PATH, or grpc://NODE@HOST:PORT, which is that node's.",
        ),
        click.option(
            "--share-directory", is_flag=True, help="Serve the sqlite: directory to other nodes."
        ),
        click.option(
            "--lease", default=LEASE_S, show_default=True, metavar="SECONDS",
            type=click.FloatRange(0.5, 600.0),
            help="Sessions of a node that is silent for so long may be taken over.",
        ),
        click.option(
            "--volume-worst", default=VOLUME_WORST_S, show_default=True, metavar="SECONDS",
            type=click.FloatRange(0.001, 60.0),
            help="Longest durable write in --data-dir; with --grpc a slower volume is refused.",
        ),
        click.option(
            "--store-root", "store_roots", multiple=True, metavar="DIR|s3://BUCKET/PREFIX",
            help="Clients may have sessions put into stores below this folder or place in a "
            "bucket; may be repeated.",
        ),
        click.option(
            "--data-plane", "data_planes", multiple=True,
            metavar="grpc-plain=HOST:PORT|socket=HOST:PORT",
            help="Also take sealed chunks on a port without TLS, by tokens given under mTLS.",
        ),
        click.option(
            "--data-plane-from", "plane_senders", multiple=True, metavar="NODE",
            help="A pinned node that may send over it; may be repeated.",
        ),
        click.option(
            "--data-plane-without-tls", "plane_without_tls", is_flag=True,
            help="Other machines may reach that port: needed for any address but loopback.",
        ),
        click.option(
            "--data-plane-to", "plane_towards", multiple=True, metavar="NODE=PLANE",
            help="Moves from here to NODE ask for that plane; may be repeated.",
        ),
        click.option(
            "--device", type=click.Choice(["cpu", "gpu"]),
            help="Where to compute; default: the GPU, if MLX has one.",
        ),
        click.option("--stop-on-stdin-end", is_flag=True, hidden=True),
        click.option(
            "--transfer-lease", default=60.0, type=click.FloatRange(0.5, 600.0), hidden=True
        ),
        click.option("--fault-points", is_flag=True, hidden=True),
    ]
)  # fmt: skip


@click.command()
@_MLX_LM
@options_of_mlx_lm
@_SERVING
@_NODE
def serve(**options: Any) -> None:  # noqa: ANN401 - click's
    """Serve one model over HTTP, as mlx_lm.server does, over gRPC with mTLS, or both.

    \b
    Examples:
      kvnode serve --model DIR
      kvnode serve --grpc 127.0.0.1:7411 --data-dir D --credentials C \\
          --directory sqlite:directory.sqlite
    With --grpc alone there is no HTTP port; --host or --port adds it.
    """
    from node.shipped import require_model

    speak_of_mlx_lm(options)
    if options["fault_points"]:
        from node.fault_points import arm

        arm(fault_order())
    # Before the daemon, whose imports take a second: a wrong option is refused at once.
    config = serve_config(options, require_model(options["model"]))
    let_grpc_speak()
    from node.daemon import serve as run

    run(
        config,
        stop_on_stdin_end=options["stop_on_stdin_end"],
        log_level=options["log_level"],
    )


def serve_config(options: dict[str, Any], folder: Path) -> ServeConfig:
    """What the options mean together, for the model in ``folder``.

    Raises:
        UsageError: They contradict each other, or one lacks another.
    """
    address = None if options["address"] is None else Address.parse(options["address"])
    http = _http_options(options, alone=address is None)
    data_dir: Path | None = options["data_dir"]
    if address is not None:
        for option in _NEEDED:
            if options[option] is None:
                raise UsageError(f"--grpc: needs {_NEEDED[option]}")
    data_dir = data_dir or default_data_dir(folder)
    directory: str = options["directory"] or f"sqlite:{data_dir / 'directory.sqlite'}"
    return ServeConfig(
        address,
        folder,
        data_dir,
        options["credentials"],
        directory,
        options["volume_worst"],
        options["lease"],
        options["share_directory"],
        options["transfer_lease"],
        store_roots=tuple(map(parse_root, options["store_roots"])),
        http=http,
        serving=_serving_options(options),
        advertise=_advertised(options),
        kv_bytes=options["kv_bytes"],
        planes=_plane_options(options),
        device=options["device"],
    )


def _plane_options(options: dict[str, Any]) -> PlaneOptions | None:
    found = PlaneOptions(
        tuple(PlaneAddress.parse(text) for text in options["data_planes"]),
        frozenset(options["plane_senders"]),
        options["plane_without_tls"],
        parse_towards(options["plane_towards"]),
    )
    if found == PlaneOptions():
        return None
    if options["address"] is None:
        raise UsageError("--data-plane, --data-plane-to: only with --grpc")
    return found


def _advertised(options: dict[str, Any]) -> Address | None:
    if options["advertise"] is None:
        return None
    if options["address"] is None:
        raise UsageError("--advertise: only with --grpc")
    advertised = Address.parse(options["advertise"])
    if not advertised.port:
        raise UsageError(f"--advertise {advertised}: expected the port that others connect to")
    return advertised


def _http_options(options: dict[str, Any], *, alone: bool) -> HttpOptions | None:
    if not alone and options["host"] is None and options["port"] is None:
        return None
    port = PORT if options["port"] is None else options["port"]
    origins = tuple(part.strip() for part in options["allowed_origins"].split(",") if part.strip())
    return HttpOptions(
        Address(options["host"] or HOST, port),
        options["api_key_file"],
        options["tls_cert"],
        options["tls_key"],
        origins,
        options["drain"],
        options["quota_calls"],
        options["quota_tokens"],
    )


def _serving_options(options: dict[str, Any]) -> ServingOptions:
    answer = AnswerDefaults(
        options["max_tokens"], options["temp"], options["top_p"], options["top_k"], options["min_p"]
    )
    return ServingOptions(
        options["slots"],
        ContextPolicy(options["context_policy"]),
        options["max_context"],
        options["keep_tokens"],
        options["cache_bytes"],
        answer,
        _template(options["chat_template"]),
        None if options["slot_save_path"] is None else options["slot_save_path"].absolute(),
        PrefillAt(options["prefill"]),
        options["producer"],
        options["remote_min_tokens"],
    )


def _template(given: str) -> str | None:
    """The text of a template: ``given`` itself, or what is in the file of that name.

    Raises:
        UsageError: The file cannot be read.
    """
    if not given:
        return None
    path = Path(given)
    try:
        if "{" in given or not path.is_file():
            return given
        with path.open("rb") as source:
            text = source.read(_TEMPLATE_BYTES_MAX + 1)
        if len(text) > _TEMPLATE_BYTES_MAX:
            raise UsageError(f"--chat-template: expected at most {_TEMPLATE_BYTES_MAX} bytes")
        return text.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("--chat-template: the file cannot be read as text") from error
