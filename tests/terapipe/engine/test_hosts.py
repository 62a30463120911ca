"""Several hosts, played by two network namespaces with a cable between them: `torchrun --nnodes 2` over gloo gives the
numbers of one process, and no link takes the other side for a neighbour to share memory with.

Nothing outside the two namespaces is touched, and both end with the processes in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from worker import HOSTS_CASE, run_layout

# $1 runs in both: first here as host 0, then behind the cable as host 1.
TWO_HOSTS = """
set -e
ip link set lo up
unshare --net sleep 300 & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add cable type veth peer name cable netns $other
ip addr add 10.77.0.1/24 dev cable
ip link set cable up
nsenter --net --target $other sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev cable; ip link set cable up'
HOST=0 sh -c "$1" & first=$!
HOST=1 nsenter --net --target $other sh -c "$1"
wait $first
"""


def _in_namespaces(command: str, environment: dict[str, str], timeout: int) -> subprocess.CompletedProcess[str]:
    own_user = [] if os.geteuid() == 0 else ["--map-root-user"]
    outer = ["unshare", "--net", "--kill-child", "--fork", *own_user, "bash", "-c", TWO_HOSTS, "hosts", command]
    return subprocess.run(outer, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def permitted() -> None:
    missing = [tool for tool in ("unshare", "nsenter", "ip", "bash") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"two network namespaces need {', '.join(missing)}")
    tried = _in_namespaces("true", dict(os.environ), 30)
    if tried.returncode != 0:
        pytest.skip(f"two network namespaces are not permitted here: {tried.stderr.strip()}")


@pytest.mark.timeout(180)
def test_two_hosts_give_the_numbers_of_one_process(permitted: None, tmp_path: Path) -> None:
    launcher = f"{sys.executable} -m torch.distributed.run --nnodes 2 --node-rank $HOST --nproc-per-node 1"
    meeting = "--master-addr 10.77.0.1 --master-port 29611"
    worker = f"{Path(__file__).parent / 'worker.py'} hosts {tmp_path}"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    done = _in_namespaces(f"exec {launcher} {meeting} {worker}", environment, 170)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    with HOSTS_CASE.pipeline(links="local") as pipeline:
        local = run_layout(pipeline, HOSTS_CASE)
    gradients = {name: gradient for report in reports for name, gradient in report["gradients"].items()}
    assert gradients.keys() == local["gradients"].keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, local["gradients"][name]), name
    for report in reports:
        assert (report["losses"], report["grad_norm"]) == (local["losses"], local["grad_norm"])
        assert report["kinds"] == {"dist"}
        assert "links 'shm' were asked for, but cannot be had" in report["refused"]
        assert "link 0->1 (activations): its ranks are on two hosts, or in two network namespaces" in report["refused"]
