"""The version of this package. pyproject.toml must have the same version."""

VERSION = "0.1.0"
