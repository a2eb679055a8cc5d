/** 64-bit integers of the wire as numbers, and seeds as bigints; nothing is ever rounded. */
import { status } from "@grpc/grpc-js";
import { HoldfastError, InvalidArgument } from "./errors.js";

/** A number from the wire; refused where a number could not hold it exactly. */
export function fromWire(value: bigint): number {
  const number = Number(value);
  if (Number.isSafeInteger(number)) return number;
  throw new HoldfastError(`the server answered ${value}, which a number cannot hold exactly`, {
    grpcStatus: status.OUT_OF_RANGE,
  });
}

/** As `fromWire`, for a field that may be absent. */
export function fromWireIfAny(value: bigint | undefined): number | undefined {
  return value === undefined ? undefined : fromWire(value);
}

/** A position or length for the wire. */
export function toWire(value: number, name: string): bigint {
  if (Number.isSafeInteger(value)) return BigInt(value);
  throw new InvalidArgument(`${name} must be an integer that a number holds exactly, not ${value}`, {
    grpcStatus: status.INVALID_ARGUMENT,
  });
}

/** As `toWire`, for an option that may be absent. */
export function toWireIfAny(value: number | undefined, name: string): bigint | undefined {
  return value === undefined ? undefined : toWire(value, name);
}

/** A seed for the wire, as a bigint where a number cannot hold it; its range is checked when it is encoded. */
export function toSeed(value: number | bigint): bigint {
  return typeof value === "bigint" ? value : toWire(value, "seed");
}
