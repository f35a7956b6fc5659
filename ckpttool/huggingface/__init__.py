"""What transformers and PEFT know: names on the Hub, files beside a model, adapters."""
