"""Settings of the stack: section `stack` of params.yaml, checked before anything starts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil

from shardcore.core.errors import ShardCoreError, redact_urls
from shardcore.core.validation import MOST_BYTES, Record, Rule, number_within, require, short_repr

_WORKER_PORTS = range(10002, 20000)
"""Default ports of Ray's workers. `ray start` fails if another of its ports is one of them."""
_LONGEST_PATH, _LONGEST_NAME = 1000, 255
"""Most bytes of a folder's path, to which names of files are added, and of each name in it."""


def _database_url(*schemes: str) -> Rule:
    """Rule that a text is "" or a database's URL of one of some schemes. These may also name a driver, such as
    postgresql+psycopg2."""

    def is_url(text: str) -> bool:
        scheme, _, rest = text.partition("://")
        known = rest and {scheme, scheme.partition("+")[0]} & set(schemes)
        return not text or bool(known and text.isprintable() and " " not in text)

    right = f"it needs a URL that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}"
    return Rule(is_url, right, found=lambda name, text: f"{name} {short_repr(redact_urls(text))}")


def _is_short_path(text: str) -> bool:
    path = Path(os.path.abspath(text))
    # Text that no file system can name is refused by another rule.
    lengths = [len(name.encode(errors="replace")) for name in (str(path), *path.parts)]
    return lengths[0] <= _LONGEST_PATH and max(lengths[1:]) <= _LONGEST_NAME


def _first_wrong_host(names: Sequence[str]) -> str | None:
    allowed = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.*-]{0,251}[A-Za-z0-9*])?")
    return next((name for name in names if not allowed.fullmatch(name)), None)


_FOLDER_RULES = (
    Rule(
        lambda text: os.path.abspath(text).isprintable() and not set(os.path.abspath(text)) & set("?#%"),
        "its path becomes part of URLs: no control characters, and none of ?#%",
    ),
    Rule(_is_short_path, f"a path may have {_LONGEST_PATH} bytes, and each name in it {_LONGEST_NAME}"),
    Rule(
        lambda text: not Path.cwd().is_relative_to(os.path.abspath(text.strip())),
        "the project is in it; it needs a folder of its own, such as .stack",
    ),
)
_HOST_NAMES = Rule(
    lambda names: _first_wrong_host(names) is None,
    "it needs names or addresses without a port, such as shardcore.example.org or 10.0.0.*",
    found=lambda name, names: f"{name} {short_repr(_first_wrong_host(names))}",
)
Port = Annotated[int, number_within(1, 65535)]
RayPort = Annotated[
    Port,
    Rule(
        lambda port: port not in _WORKER_PORTS,
        f"Ray's workers have {_WORKER_PORTS.start} to {_WORKER_PORTS.stop - 1}, so it needs another",
    ),
]


@dataclass(frozen=True)
class StackConfig(Record, noun="stack"):
    """Settings of the stack (`make up`).

    folder: folder of data, logs and the token.
    host: address at which the services listen. 0.0.0.0: all addresses of this machine.
    prefect_port, mlflow_port, ray_port, ray_client_port, dashboard_port, metrics_port: ports of the services, all
      different.
    object_store_mib: memory of Ray's object store.
    prefect_database, mlflow_database: SQLAlchemy URLs. Empty: SQLite in the folder.
    artifacts: place of MLflow's files. Empty: in the folder.
    allowed_hosts: further names and addresses, such as a proxy's, at which browsers and clients reach MLflow. It
      answers 403 to others. "*": any.
    """

    folder: Annotated[str, *_FOLDER_RULES] = ".stack"
    host: Annotated[str, Rule(lambda text: text.strip() != "", "it needs an address")] = "127.0.0.1"
    prefect_port: Port = 4200
    mlflow_port: Port = 5000
    ray_port: RayPort = 6379
    ray_client_port: RayPort = 10001
    dashboard_port: RayPort = 8265
    metrics_port: RayPort = 8080
    object_store_mib: Annotated[int, number_within(80, MOST_BYTES >> 20)] = 256
    prefect_database: Annotated[str, _database_url("postgresql+asyncpg", "sqlite+aiosqlite")] = ""
    mlflow_database: Annotated[str, _database_url("postgresql", "mysql", "sqlite", "mssql")] = ""
    artifacts: str = ""
    allowed_hosts: Annotated[tuple[str, ...], _HOST_NAMES] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        names: dict[int, str] = {}
        for name in (name for name in vars(self) if name.endswith("_port")):
            other = names.setdefault(getattr(self, name), name)
            require(
                name == other,
                f"stack.{name} is {getattr(self, name)}, as {other}; each port is one of its own",
            )

    @property
    def is_on_loopback(self) -> bool:
        return self.host == "localhost" or self.host.startswith("127.")

    @property
    def client_host(self) -> str:
        """Address of the stack's host for clients on this machine."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    def url(self, port: int) -> str:
        return f"http://{self.client_host}:{port}"


def require_usable(config: StackConfig, folder: Path) -> None:
    """Raise ShardCoreError if this machine cannot run a stack of a configuration. Writes nothing."""
    require(
        not (folder.exists() and any(folder.iterdir()))
        or any(any(folder.glob(ours)) for ours in ("lock", "token", "*.pid")),
        f"stack.folder is {short_repr(config.folder)}, which holds other things; it needs a folder of its own, such "
        f"as {StackConfig.folder}",
    )
    try:
        with socket.socket() as s:
            # Only an address of this machine can be bound.
            s.bind((config.host, 0))
            is_all_addresses = s.getsockname()[0] == "0.0.0.0"
    except (OSError, ValueError, TypeError) as error:  # also for a name with NUL, or a name that is too long
        raise ShardCoreError(
            f"stack.host is {short_repr(config.host)}, which is no IPv4 address of this machine ({error}); 127.0.0.1 "
            "serves this machine, 0.0.0.0 others too"
        ) from None
    require(
        config.host == "0.0.0.0" or not is_all_addresses,
        f"stack.host is {short_repr(config.host)}, which means all addresses; write 0.0.0.0 for that",
    )
    most = psutil.virtual_memory().total >> 20
    require(
        config.object_store_mib <= most,
        f"stack.object_store_mib is {config.object_store_mib}; this machine has {most}",
    )
