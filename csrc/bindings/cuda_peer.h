// bindings/cuda_peer.h: adds the kernels of a peer link to tpkernels._cuda.
#pragma once

#include <pybind11/pybind11.h>

void bind_cuda_peer(pybind11::module_& m);
