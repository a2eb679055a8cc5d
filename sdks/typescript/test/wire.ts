/** A wire that can be cut: TCP to a server and back. */
import { type AddressInfo, connect, createServer, type Socket } from "node:net";

export interface Wire {
  address: string;
  /** Drops every connection; new ones are taken. */
  cut(): void;
  close(): void;
}

export async function wireTo(port: number): Promise<Wire> {
  const sockets = new Set<Socket>();
  const server = createServer((inner) => {
    const outer = connect(port, "127.0.0.1");
    for (const [from, to] of [
      [inner, outer],
      [outer, inner],
    ] as const) {
      sockets.add(from);
      from.pipe(to);
      from.on("error", () => to.destroy());
      from.on("close", () => {
        sockets.delete(from);
        to.destroy();
      });
    }
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const cut = () => {
    for (const socket of sockets) socket.destroy();
  };
  const { port: own } = server.address() as AddressInfo;
  return {
    address: `127.0.0.1:${own}`,
    cut,
    close: () => {
      cut();
      server.close();
    },
  };
}
