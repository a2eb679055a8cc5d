"""The gRPC endpoint: sessions of raw tokens."""

from holdfast.serving.grpc.server import GrpcDoor, create_server

__all__ = ["GrpcDoor", "create_server"]
