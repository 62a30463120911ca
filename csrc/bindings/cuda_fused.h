// bindings/cuda_fused.h: adds the fused kernels to tpkernels._cuda.
#pragma once

#include <pybind11/pybind11.h>

void bind_cuda_fused(pybind11::module_& m);
