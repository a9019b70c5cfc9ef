"""The demonstration: label small molecules with GFN2-xTB, train on them, test on molecules never seen, run dynamics."""
