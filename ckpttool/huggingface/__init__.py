"""Knowledge about transformers and PEFT: names on the Hub, files next to a model, adapters."""
