"""Graph passes: FX graph in, FX graph out. One pass a file; no pass knows the runtime."""
