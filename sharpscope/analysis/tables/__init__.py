"""Tables: of a study, of the paper's layout, of where training ended."""
