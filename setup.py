"""Builds tpkernels._core, terapipe._core and, where wanted, tpkernels._cuda with CMake; the rest is in pyproject.toml.

CMake is the only place that lists sources and flags. This file configures it in a build folder that is kept between
in-place builds, limits the jobs by free memory (the SIMD kernels need about 1 GiB a compiler), and honours MAX_JOBS,
CMAKE_ARGS, DEBUG and TPK_CUDA (csrc/cuda/FindWanted.cmake).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
BYTES_PER_JOB = 1 << 30


def parallel_jobs() -> int:
    """MAX_JOBS, or as many jobs as cores and free memory allow."""
    if "MAX_JOBS" in os.environ:
        return max(1, int(os.environ["MAX_JOBS"]))
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        free = jobs * BYTES_PER_JOB
    return max(1, min(jobs, free // BYTES_PER_JOB))


class CMakeBuild(build_ext):
    """setuptools asks for two extensions; one run of CMake puts each where setuptools expects it."""

    def build_extensions(self) -> None:
        folders = {ext.name: Path(self.get_ext_fullpath(ext.name)).resolve().parent for ext in self.extensions}
        # One persistent folder for in-place builds (a rebuild is `ninja -C build/inplace`), a temporary one for wheels.
        build = ROOT / "build" / "inplace" if self.inplace or self.editable_mode else Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        cache = build / "CMakeCache.txt"
        if cache.exists():  # an isolated build's Python and ninja are gone the next time; ninja's own state stays valid
            cache.unlink()
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_BUILD_TYPE={'Debug' if os.environ.get('DEBUG') == '1' else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTERAPIPE_OUTPUT_DIR={folders['tpkernels._core']}",
            f"-DTERAPIPE_PLANNER_OUTPUT_DIR={folders['terapipe._core']}",
            f"-DTPK_CUDA={os.environ.get('TPK_CUDA', 'auto')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        # Last on the path: this Python's own cmake and ninja, found also where it was started by its full name.
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
        for command in (configure, ["cmake", "--build", str(build), "--parallel", str(parallel_jobs())]):
            try:
                subprocess.run(command, check=True, env={**os.environ, "PATH": path})
            except (OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(
                    f"terapipe: building the extensions failed in: {shlex.join(command)}\n{error}"
                ) from error


EXTENSIONS = [Extension("tpkernels._core", sources=[]), Extension("terapipe._core", sources=[])]
setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": CMakeBuild})
