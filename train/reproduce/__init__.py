"""The claim, over arms, rates and seeds: `python -m train.reproduce`."""
