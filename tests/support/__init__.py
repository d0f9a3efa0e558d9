"""What several tests share: inputs, references, small models. Not a test itself."""
