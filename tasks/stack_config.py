"""Settings of the stack: section `stack` of params.yaml, checked before anything starts."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardcore.core.errors import ShardCoreError, redact_urls

_DATABASES = {
    "prefect_database": ("postgresql+asyncpg", "sqlite+aiosqlite"),
    "mlflow_database": ("postgresql", "mysql", "sqlite", "mssql"),
}
"""Valid schemes of URLs. MLflow's may also name a driver, such as postgresql+psycopg2."""
_LONGEST_PATH, _LONGEST_NAME = 1000, 255
"""Most bytes of a folder's path, to which names of files are added, and of each name in it."""
_ALLOWED_HOST = r"[A-Za-z0-9*]([A-Za-z0-9.*-]{0,251}[A-Za-z0-9*])?"
_RAY_PORTS = ("ray_port", "ray_client_port", "dashboard_port", "metrics_port")
_WORKER_PORTS = range(10002, 20000)
"""Default ports of Ray's workers. `ray start` fails if another of its ports is one of them."""


@dataclass(frozen=True)
class StackConfig:
    """The stack's settings.

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

    folder: str = ".stack"
    host: str = "127.0.0.1"
    prefect_port: int = 4200
    mlflow_port: int = 5000
    ray_port: int = 6379
    ray_client_port: int = 10001
    dashboard_port: int = 8265
    metrics_port: int = 8080
    object_store_mib: int = 256
    prefect_database: str = ""
    mlflow_database: str = ""
    artifacts: str = ""
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("folder", "host"):
            if not getattr(self, name).strip():
                raise ShardCoreError(
                    f"stack.{name} is empty; it needs a value such as {getattr(StackConfig, name)}"
                )
        for name in self.allowed_hosts:
            if not re.fullmatch(_ALLOWED_HOST, name):
                raise ShardCoreError(
                    f"stack.allowed_hosts has {_shortened_repr(name)}; it needs names or "
                    "addresses without a port, such as shardcore.example.org or 10.0.0.*"
                )
        for name, kinds in _DATABASES.items():
            value = getattr(self, name)
            scheme, _, rest = value.partition("://")
            known = rest and {scheme, scheme.partition("+")[0]} & set(kinds)
            if value and not (known and value.isprintable() and " " not in value):
                raise ShardCoreError(
                    f"stack.{name} is {_shortened_repr(redact_urls(value))}; it "
                    f"needs a URL that begins with "
                    f"{' or '.join(f'{kind}://' for kind in kinds)}"
                )
        if wrong := _folder_fault(self.folder):
            raise ShardCoreError(f"stack.folder is {_shortened_repr(self.folder)}; {wrong}")
        ports = {k: v for k, v in vars(self).items() if k.endswith("_port")}
        for name, port in ports.items():
            if not 0 < port < 65536 or list(ports.values()).count(port) > 1:
                raise ShardCoreError(
                    f"stack.{name} is {port}; each port is between 1 and 65535, and one of its own"
                )
            if name in _RAY_PORTS and port in _WORKER_PORTS:
                raise ShardCoreError(
                    f"stack.{name} is {port}; Ray's workers have {_WORKER_PORTS.start} to "
                    f"{_WORKER_PORTS.stop - 1}, so it needs another"
                )
        if self.object_store_mib < 80:
            raise ShardCoreError(f"stack.object_store_mib is {self.object_store_mib}; Ray needs 80 at least")

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
    if (
        folder.exists()
        and any(folder.iterdir())
        and not any(any(folder.glob(ours)) for ours in ("lock", "token", "*.pid"))
    ):
        raise ShardCoreError(
            f"stack.folder is {_shortened_repr(config.folder)}, which holds other things; it "
            f"needs a folder of its own, such as {StackConfig.folder}"
        )
    try:
        with socket.socket() as s:
            # Only an address of this machine can be bound.
            s.bind((config.host, 0))
            is_all_addresses = s.getsockname()[0] == "0.0.0.0"
    except (OSError, ValueError, TypeError) as error:  # also for a name with NUL, or a name that is too long
        raise ShardCoreError(
            f"stack.host is {_shortened_repr(config.host)}, which is no IPv4 address of this "
            f"machine ({error}); 127.0.0.1 serves this machine, 0.0.0.0 others "
            "too"
        ) from None
    if is_all_addresses and config.host != "0.0.0.0":
        raise ShardCoreError(
            f"stack.host is {_shortened_repr(config.host)}, which means all addresses; write 0.0.0.0 for that"
        )
    if config.object_store_mib > (most := psutil.virtual_memory().total >> 20):
        raise ShardCoreError(f"stack.object_store_mib is {config.object_store_mib}; this machine has {most}")


def _folder_fault(given: str) -> str:
    """Why the stack cannot use a folder. "" if the folder is usable."""
    folder = Path(os.path.abspath(given))
    if not str(folder).isprintable() or set(str(folder)) & set("?#%"):
        return f"its path {_shortened_repr(str(folder))} becomes part of URLs: no control characters, and none of ?#%"
    if (
        len(os.fsencode(folder)) > _LONGEST_PATH
        or max(len(os.fsencode(part)) for part in folder.parts) > _LONGEST_NAME
    ):
        return f"a path may have {_LONGEST_PATH} bytes, and each name in it {_LONGEST_NAME}"
    if Path.cwd().is_relative_to(folder):
        return f"the project is in it; it needs a folder of its own, such as {StackConfig.folder}"
    return ""


def _shortened_repr(value: str) -> str:
    return repr(value if len(value) <= 80 else f"{value[:77]}...")
