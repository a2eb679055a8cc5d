/** This package's version, as servers see it in the user agent. */
export const VERSION = "0.1.0";
