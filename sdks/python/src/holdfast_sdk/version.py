"""The SDK's version, the one place that names it."""

VERSION = "0.1.0"
