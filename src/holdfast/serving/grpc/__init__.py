"""The gRPC door: raw-token sessions."""

from holdfast.serving.grpc.server import GrpcDoor, create_server

__all__ = ["GrpcDoor", "create_server"]
