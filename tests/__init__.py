"""A regular package, as the wheel of verl brings one of the same name."""
