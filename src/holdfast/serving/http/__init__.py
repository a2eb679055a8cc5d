"""The HTTP door. Today: health and metrics."""

from holdfast.serving.http.app import create_app

__all__ = ["create_app"]
