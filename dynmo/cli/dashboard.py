"""`dynmo dashboard [FOLDER]` shows runs in a browser while they train."""

from __future__ import annotations

import secrets
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dynmo.cli.options import ARGUMENT, CommandOptions, command
from dynmo.cli.output import print_json
from dynmo.errors import InputError, not_installed

_BACKLOG = 64


class DashboardOptions(CommandOptions):
    folder: Annotated[Path, ARGUMENT] = Path("runs")
    """A run's folder, or a folder of runs."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8642
    """Port on 127.0.0.1. 0: any free one."""


@command
def dashboard(options: DashboardOptions) -> None:
    if find_spec("starlette") is None:
        raise InputError(f"dynmo dashboard: {not_installed('starlette')}")
    if find_spec("uvicorn") is None:
        raise InputError(f"dynmo dashboard: {not_installed('uvicorn')}")
    if not options.folder.is_dir():
        raise InputError(f"there is no folder {options.folder}; give runs, or runs/NAME")
    import uvicorn

    from dynmo.report.dashboard import application

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", options.port))
        except OSError as error:
            raise InputError(
                f"port {options.port} of 127.0.0.1 cannot be used ({error.strerror}); give another "
                "one: --port 0 takes any that is free"
            ) from None
        listener.listen(_BACKLOG)
        port, token = listener.getsockname()[1], secrets.token_urlsafe(16)
        address = f"http://127.0.0.1:{port}/?token={token}"
        if options.as_json:
            print_json({"address": address, "port": port, "token": token})
        else:
            print(f"dashboard of {options.folder}: {address}")
            print(f"Ctrl-C ends it. From another machine: ssh -L {port}:127.0.0.1:{port} HOST")
        sys.stdout.flush()
        config = uvicorn.Config(
            application(options.folder, token, port),
            log_level="warning",
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(config).run(sockets=[listener])
