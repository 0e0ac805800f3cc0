"""The validation campaign: what is measured, on which ranks, and how it is compared."""
