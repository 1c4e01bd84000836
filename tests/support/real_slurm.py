"""A cluster of real Slurm on this machine, whose nodes have loopback addresses as names."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")
_CONFIGURATION = """
ClusterName=tested
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# Slurm waits with a job that is queued again until the credentials of its last run are void.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=30
SchedulerParameters=sched_interval=2,batch_sched_delay=0
GresTypes=gpu
NodeName=127.0.0.[1-{nodes}] NodeHostname={host} Port=[{ports[1]}-{ports[2]}] CPUs=2 Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Returns why there can be no cluster here; None: there can."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"there is no {absent[0]}: apt-get install slurm-wlm munge"
    return None if os.getuid() == 0 else "Slurm's daemons start jobs as root only"


class Cluster:
    """Slurm's controller and a daemon for each node.

    Args:
        folder: folder of all its files.
        nodes: number of nodes, each with one GPU that is none.

    Attributes:
        env: environment of Slurm's commands.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.names = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
        self.env = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        first = _free_ports(nodes + 1)
        host = socket.gethostname().partition(".")[0]
        ports = [first, first + 1, first + nodes]
        text = _CONFIGURATION.format(folder=folder, nodes=nodes, host=host, ports=ports)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "state").mkdir()
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def start(self) -> None:
        """Starts all daemons, and waits until the nodes are idle."""
        files = {"key-file": "key", "socket": "munge.socket", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "seed"}
        self.run("munged", "--force", *(f"--{k}={self.folder / v}" for k, v in files.items()))
        self.run("slurmctld", "-c")
        for name in self.names:
            self.start_node(name)
        self.wait_for(lambda: self.states() == dict.fromkeys(self.names, "idle"), 60)

    def run(self, *command: str) -> str:
        """Runs a command of Slurm's, and returns what it printed."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start_node(self, name: str) -> None:
        """Starts a node's daemon."""
        self.run("slurmd", "-N", name)

    def states(self) -> dict[str, str]:
        """Returns the state of each node."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format", "%N %T").splitlines()
        return dict(tuple(line.split()) for line in lines)

    def kill_node(self, name: str) -> None:
        """Kills a node's daemon and all that it runs, as a machine does that loses its power."""
        os.kill(int((self.folder / f"slurmd-{name}.pid").read_text()), signal.SIGKILL)
        marks = {f"SLURMD_NODENAME={name}", f"SLURM_CONF={self.folder / 'slurm.conf'}"}
        for pid, its in _environments():
            if marks <= its:
                for each in (_parent_if_step(pid), pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each or pid, signal.SIGKILL)

    def job(self, number: str) -> Mapping[str, str]:
        """Returns what Slurm says of a job."""
        words = self.run("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, condition: object, seconds: float) -> None:
        """Waits until a function returns something true."""
        assert callable(condition)
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = "\n".join(
                    f"{path.name}: {path.read_text()[-1500:]}" for path in self.folder.glob("*.log")
                )
                raise AssertionError(f"it did not come to that in {seconds} s\n{logs}")
            time.sleep(1.0)

    def stop(self) -> None:
        """Ends all daemons, and what they run."""
        marks = {f"SLURM_CONF={self.folder / 'slurm.conf'}"}
        files = [*self.folder.glob("slurm*.pid"), *self.folder.glob("munged.pid")]
        found = [int(path.read_text()) for path in files]
        for pid, its in _environments():
            if marks <= its and pid != os.getpid():
                found += [each for each in (_parent_if_step(pid), pid) if each is not None]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    """Makes a cluster, and ends it."""
    # Sockets have short paths.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder), nodes)
        try:
            made.start()
            yield made
        finally:
            made.stop()


def _free_ports(count: int) -> int:
    """Returns the first of some free ports below those that the system gives to connections."""
    for first in range(21_000, 31_000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first
    raise AssertionError("no ports are free")


def _environments() -> Iterator[tuple[int, set[str]]]:
    """Returns the processes of this machine with their environments' variables."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            yield int(folder.name), {each.decode(errors="replace") for each in variables}


def _parent_if_step(pid: int) -> int | None:
    """Returns a process' parent if that is a step of Slurm's."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
            return parent
    return None
