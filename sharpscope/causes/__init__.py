"""Named causes: identities that recorded columns must satisfy, and what a violation means by where it occurs."""
