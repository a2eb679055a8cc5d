/** A certificate for one test, made in memory: no key in the repository, and none that expires. */
import { generateKeyPairSync, sign } from "node:crypto";

const ECDSA_WITH_SHA256 = "2a8648ce3d040302";
const COMMON_NAME = "550403";
const SUBJECT_ALT_NAME = "551d11";
const BASIC_CONSTRAINTS = "551d13";

export function selfSigned(name: string): { certificate: string; privateKey: string } {
  const keys = generateKeyPairSync("ec", { namedCurve: "P-256" });
  const algorithm = sequence(oid(ECDSA_WITH_SHA256));
  const who = sequence(set(sequence(oid(COMMON_NAME), tagged(0x0c, Buffer.from(name)))));
  const validity = sequence(utcTime(Date.now() - 60_000), utcTime(Date.now() + 3_600_000));
  const altName = sequence(tagged(0x82, Buffer.from(name)));
  const authority = sequence(tagged(0x01, Buffer.from([0xff])));
  const extensions = tagged(
    0xa3,
    sequence(
      sequence(oid(SUBJECT_ALT_NAME), tagged(0x04, altName)),
      sequence(oid(BASIC_CONSTRAINTS), tagged(0x04, authority)),
    ),
  );
  const version = tagged(0xa0, integer(2));
  const publicKey = keys.publicKey.export({ type: "spki", format: "der" });
  const body = sequence(version, integer(1), algorithm, who, validity, who, publicKey, extensions);
  const signature = tagged(0x03, Buffer.concat([Buffer.from([0]), sign("sha256", body, keys.privateKey)]));
  return {
    certificate: pem("CERTIFICATE", sequence(body, algorithm, signature)),
    privateKey: keys.privateKey.export({ type: "pkcs8", format: "pem" }) as string,
  };
}

function tagged(tag: number, content: Buffer): Buffer {
  const size = content.length;
  const length = size < 128 ? [size] : size < 256 ? [0x81, size] : [0x82, size >> 8, size & 255];
  return Buffer.concat([Buffer.from([tag, ...length]), content]);
}

const sequence = (...parts: Buffer[]) => tagged(0x30, Buffer.concat(parts));
const set = (...parts: Buffer[]) => tagged(0x31, Buffer.concat(parts));
const oid = (hex: string) => tagged(0x06, Buffer.from(hex, "hex"));
const integer = (value: number) => tagged(0x02, Buffer.from([value]));

function utcTime(ms: number): Buffer {
  const digits = new Date(ms).toISOString().replace(/[-:T]|\.\d+/g, "");
  return tagged(0x17, Buffer.from(digits.slice(2)));
}

function pem(kind: string, der: Buffer): string {
  const lines = der.toString("base64").match(/.{1,64}/g) ?? [];
  return [`-----BEGIN ${kind}-----`, ...lines, `-----END ${kind}-----`, ""].join("\n");
}
