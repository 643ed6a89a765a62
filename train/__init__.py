"""Post-trains a language model with verifiable rewards: `python -m train`."""
