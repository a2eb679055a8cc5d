/** Messages to bytes and back, and what gRPC calls a method. */
import {
  create,
  type DescMessage,
  type DescMethod,
  fromBinary,
  type MessageInitShape,
  type MessageShape,
  toBinary,
} from "@bufbuild/protobuf";
import { status } from "@grpc/grpc-js";
import { InvalidArgument } from "./errors.js";

/** A method of the contract, with its kind and messages as types. */
export type Method<Kind, I extends DescMessage, O extends DescMessage> = DescMethod & {
  methodKind: Kind;
  input: I;
  output: O;
};

/** The bytes of a request; a value that does not fit its field is refused here, before anything is sent. */
export function encode<S extends DescMessage>(schema: S, message: MessageInitShape<S>): Uint8Array {
  try {
    return toBinary(schema, create(schema, message));
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    throw new InvalidArgument(why, { grpcStatus: status.INVALID_ARGUMENT, cause: error });
  }
}

export function decoder<S extends DescMessage>(schema: S): (bytes: Uint8Array) => MessageShape<S> {
  return (bytes) => fromBinary(schema, bytes);
}

export function pathOf(method: DescMethod): string {
  return `/${method.parent.typeName}/${method.name}`;
}

/** For gRPC, which wants a serializer: requests are encoded before they are handed over. */
export function asIs(body: Uint8Array): Buffer {
  return Buffer.from(body.buffer, body.byteOffset, body.byteLength);
}
