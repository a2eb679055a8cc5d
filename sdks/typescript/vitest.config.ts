import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["test/**/*.test.ts"],
    // Two workers are plenty: every test waits on a socket, not on a core.
    maxWorkers: 2,
    testTimeout: 20_000,
  },
});
