"""The proofs at full scale: `scripts/soak`. Each part is a module with a `run(options, tell)`."""
