"""Codes by which C++ knows a dtype: `tpk::DType` of csrc/include/tpk/attention_params.h."""

from __future__ import annotations

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
