"""A Slurm cluster of this machine alone: Debian's munged, slurmctld and slurmd, in their own folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

NODES = ("node1", "node2")
STARTS = 60  # seconds that a start or an end may take on a busy machine
# What Debian's packages slurmctld, slurmd, slurm-client and munge bring; two of them are in /usr/sbin.
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
SEARCH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])

# config_overrides: the nodes have the memory that is written here, whatever the machine has. OverMemoryKill: a job is
# killed when its memory, read each second, exceeds the limit; it needs no cgroups, and so no root.
_SLURM = """
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,bf_interval=2
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=2 RealMemory={memory} Gres=gpu:1
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node2} CPUs=2 RealMemory={memory}
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=node1 MaxTime=INFINITE State=UP
"""
_GRES = "NodeName=node1 Name=gpu File={folder}/gpu0\n"


def missing() -> list[str]:
    """The programs that are not installed here."""
    return [program for program in PROGRAMS if shutil.which(program, path=SEARCH) is None]


class Cluster:
    """Two nodes of two CPUs; node1 has one GPU, which is a file, and a partition `gpu`. Use as a context.

    folder: for configuration, keys, sockets, state and logs. memory: of each node, in MB.
    """

    def __init__(self, folder: Path, memory: int = 16_000) -> None:
        self.folder = folder
        self._daemons = list[tuple[str, subprocess.Popen[bytes]]]()
        controller, node1, node2 = _free_ports(3)
        values = {
            "folder": folder, "host": socket.gethostname().partition(".")[0], "user": getpass.getuser(),
            "memory": memory, "controller": controller, "node1": node1, "node2": node2,
        }  # fmt: skip
        for name in ("munge", "state", *(f"spool/{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o711)
        key = folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        (folder / "gpu0").touch()
        # Snakemake's plugin starts srun without the variables that begin with SLURM_. Elsewhere the configuration lies
        # in /etc/slurm; here it must be said again.
        srun = folder / "bin" / "srun"
        srun.parent.mkdir()
        srun.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {shutil.which("srun", path=SEARCH)} "$@"\n')
        srun.chmod(0o755)
        (folder / "slurm.conf").write_text(_SLURM.format(**values))
        (folder / "gres.conf").write_text(_GRES.format(**values))

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be a client of the cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{self.folder / 'bin'}{os.pathsep}{SEARCH}"}

    def __enter__(self) -> Cluster:
        munge = self.folder / "munge"
        conf = self.folder / "slurm.conf"
        files = [f"--{name}={munge / name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "seed-file")]
        try:
            # --force: the folder may be below one that others can write to, as /tmp.
            self._start("munged", "--foreground", "--force", *files, f"--log-file={munge / 'log'}")
            self.wait_for(lambda: (munge / "socket").exists(), "munged to listen")
            self._start("slurmctld", "-D", "-f", conf)
            for node in NODES:
                self._start("slurmd", "-D", "-f", conf, "-N", node)
            self.wait_for(lambda: set(self.nodes().values()) == {"idle"}, "all nodes to be idle")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(subprocess.CalledProcessError, AssertionError):
            self.cancel_all()
        self._end()

    def run(self, *command: str) -> str:
        """The output of one of Slurm's commands. Raises CalledProcessError."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    def nodes(self) -> dict[str, str]:
        """State by node: idle, mixed, allocated, draining, drained, down ... Empty while nobody answers."""
        try:
            output = self.run("sinfo", "--noheader", "--Node", "--format=%N %T")
        except subprocess.CalledProcessError:
            return {}
        return dict(line.split() for line in output.splitlines())

    def jobs(self, form: str, *options: str) -> list[str]:
        """A line of `squeue --format` for each job that waits or runs."""
        return self.run("squeue", "--noheader", f"--format={form}", *options).splitlines()

    def finished(self) -> list[Mapping[str, str]]:
        """Of each job that has ended, in that order: JobId, JobState, NodeList and others."""
        path = self.folder / "jobs.txt"
        lines = path.read_text().splitlines() if path.is_file() else []
        jobs = []
        for line in lines:
            parts = [part.partition("=") for part in line.split(" ") if "=" in part]
            jobs.append({name: value for name, _, value in parts})
        return jobs

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait for their end."""
        self.run("scancel", "--user", getpass.getuser())
        self.wait_for(lambda: not self.jobs("%A"), "all jobs to end")

    def update_node(self, node: str, state: str) -> None:
        """Set a node's state: drain, down or resume."""
        self.run("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")

    def _start(self, program: str, *arguments: object) -> None:
        program_path = shutil.which(program, path=SEARCH)
        assert program_path, f"{program} is not installed"
        # They end with this process, also where it is killed.
        command = ["setpriv", "--pdeathsig", "TERM", program_path, *map(str, arguments)]
        with (self.folder / f"{program}.out").open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment}, start_new_session=True,
            )  # fmt: skip
        self._daemons.append((program, process))

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = STARTS) -> None:
        """Wait until the condition holds. Raises AssertionError when it does not in time, or a daemon has ended."""
        end = time.monotonic() + seconds
        while not condition():
            ended = [program for program, process in self._daemons if process.poll() is not None]
            assert not ended, f"{ended[0]} ended; its last words are in {self.folder}/{ended[0]}.out"
            assert time.monotonic() < end, f"waited for {what} in vain"
            time.sleep(0.2)

    def _end(self) -> None:
        """End the daemons, the last one first: munged is needed by the others."""
        for _, process in reversed(self._daemons):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STARTS)
            process.kill()
            process.wait()
        self._daemons.clear()


def _free_ports(count: int) -> list[int]:
    ends = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [end.getsockname()[1] for end in ends]
    for end in ends:
        end.close()
    return ports
