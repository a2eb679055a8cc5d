/** Where a client connects and as whom: address, certificates, key, channel options. */
import { isIPv4 } from "node:net";
import { type ChannelCredentials, type ChannelOptions, credentials, status } from "@grpc/grpc-js";
import { InvalidArgument } from "./errors.js";
import { VERSION } from "./version.js";

/** Certificates as PEM. */
export interface TlsOptions {
  /** Whom to trust; the ones that Node brings where absent. */
  rootCertificates?: Uint8Array | string;
  /** For servers that ask for a client certificate, together with `certificateChain`. */
  privateKey?: Uint8Array | string;
  certificateChain?: Uint8Array | string;
  /** The name in the server's certificate, where it is not the one in the address. */
  serverName?: string;
}

export interface EndpointOptions {
  /** Sent with every call as `authorization: Bearer <key>`. */
  apiKey?: string;
  /** Plain text where absent. */
  tls?: true | TlsOptions;
  /** Lets the key travel in plain text to another machine. */
  insecure?: boolean;
}

export interface Endpoint {
  address: string;
  credentials: ChannelCredentials;
  channelOptions: ChannelOptions;
  apiKey: string | undefined;
  /** Milliseconds until another address is tried; `Infinity` where there is none. */
  connectMs: number;
}

const MAX_MESSAGE_BYTES = 256 * 1024 * 1024;
const CONNECT_MS = 2_000;

/** One address or several, in the order in which they are to be used. */
export function endpointsOf(addresses: string | readonly string[], options: EndpointOptions): Endpoint[] {
  const all = typeof addresses === "string" ? [addresses] : addresses;
  if (all.length === 0) throw refused("the list of addresses is empty; give at least one host:port");
  const connectMs = all.length > 1 ? CONNECT_MS : Number.POSITIVE_INFINITY;
  return all.map((address) => ({ ...endpointOf(address, options), connectMs }));
}

/** A checked endpoint; no message ever holds the key. */
export function endpointOf(address: string, { apiKey, tls, insecure = false }: EndpointOptions): Endpoint {
  const isLocal = isLoopback(address);
  if (apiKey !== undefined) {
    if (!/^[\x21-\x7e]+$/.test(apiKey)) throw refused("the API key is empty or holds characters that cannot be sent");
    if (tls === undefined && !isLocal && !insecure) {
      throw refused(`the API key would travel in plain text to ${address}: set tls, or insecure on a trusted network`);
    }
  }
  const { rootCertificates, privateKey, certificateChain, serverName } = tls === true ? {} : (tls ?? {});
  const channelOptions: ChannelOptions = {
    "grpc.primary_user_agent": `holdfast-sdk-typescript/${VERSION}`,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    // Retries are this SDK's own: a service config found in DNS must not add unsafe ones.
    "grpc.service_config_disable_resolution": 1,
    // The default second of waiting after a refused connection would outlast the first retries.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 5_000,
  };
  if (isLocal) channelOptions["grpc.enable_http_proxy"] = 0;
  if (serverName !== undefined) channelOptions["grpc.ssl_target_name_override"] = serverName;
  return {
    address,
    credentials: tls
      ? credentials.createSsl(pem(rootCertificates), pem(privateKey), pem(certificateChain))
      : credentials.createInsecure(),
    channelOptions,
    apiKey,
    connectMs: Number.POSITIVE_INFINITY,
  };
}

/** Whether the address stays on this machine; one that is no address is refused. */
function isLoopback(address: string): boolean {
  if (address.startsWith("unix:")) return true;
  const [, host] = /^(?:dns:(?:\/\/\/)?|ipv4:|ipv6:)?(\[[^\]]+\]|[^:/]+):\d+$/.exec(address) ?? [];
  if (host === undefined) throw refused(`${JSON.stringify(address)} is not host:port`);
  if (isIPv4(host)) return host.startsWith("127.");
  return host === "[::1]" || host === "localhost" || host.endsWith(".localhost");
}

function pem(text: Uint8Array | string | undefined): Buffer | null {
  if (text === undefined) return null;
  return typeof text === "string" ? Buffer.from(text) : Buffer.from(text);
}

function refused(message: string): InvalidArgument {
  return new InvalidArgument(message, { grpcStatus: status.INVALID_ARGUMENT });
}
