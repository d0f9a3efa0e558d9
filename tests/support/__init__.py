"""Code that several tests share: inputs, references, small models. It holds no test."""
