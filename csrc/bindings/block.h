// bindings/block.h: adds the whole block to tpkernels._core.
#pragma once

#include <pybind11/pybind11.h>

void bind_block(pybind11::module_& m);
