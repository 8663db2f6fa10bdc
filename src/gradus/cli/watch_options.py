"""What was typed after `gradus watch`, and which of its three ways is meant: here, in a browser, or elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from gradus.schema.errors import InputError


@dataclass(frozen=True)
class WatchOptions:
    run: str | None = None
    runs: str = "runs"
    once: bool = False
    every: float | None = None
    web: bool = False
    port: int = 0
    bind: str = "127.0.0.1"
    token_file: str | None = None
    textfile: str | None = None
    export: str | None = None
    to: str | None = None
    as_json: bool = False


def watch_as_told(options: WatchOptions) -> int:
    _refuse_what_does_not_go_together(options)
    if options.web:
        from gradus.cli.watch_web import WebOptions, watch_web_command

        return watch_web_command(
            WebOptions(
                options.run,
                options.runs,
                options.port,
                options.bind,
                options.token_file,
                options.textfile,
                options.as_json,
            )
        )
    if options.run is None:
        raise InputError(
            "RUN: missing",
            hint="gradus runs lists them; gradus watch --web shows all of them in a browser",
            field="RUN",
            found="nothing",
            allowed="a path, an id or a name",
        )
    if options.export is not None:
        from gradus.cli.export import follow_command

        return follow_command(options.run, options.runs, options.export, options.to, options.every, options.as_json)
    from gradus.cli.watch import watch_command

    return watch_command(options.run, options.runs, once=options.once, every=options.every, as_json=options.as_json)


def _refuse_what_does_not_go_together(options: WatchOptions) -> None:
    default = WatchOptions()
    needs = {
        "--port": (options.port != default.port, options.web, "--web"),
        "--bind": (options.bind != default.bind, options.web, "--web"),
        "--token-file": (options.token_file is not None, options.web, "--web"),
        "--textfile": (options.textfile is not None, options.web, "--web"),
        "--to": (options.to is not None, options.export is not None, "--export"),
    }
    for option, (given, has_it, needed) in needs.items():
        if given and not has_it:
            raise InputError(f"{option}: found it without {needed}", field=option, allowed=f"with {needed}")
    if options.web and (options.export is not None or options.once or options.every is not None):
        other = "--export" if options.export is not None else "--once" if options.once else "--every"
        raise InputError(f"--web: found it with {other}; allowed: one of them", field=other, allowed="one of them")
