"""Provides Parameter and ParameterTuple at MindSpore's import path."""

from __future__ import annotations

from mscomm.tensor import Parameter as Parameter
from mscomm.tensor import ParameterTuple as ParameterTuple
