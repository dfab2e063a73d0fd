"""The commands, grouped by what a person wants: train, see, sweep, look things up, probe, measure speed."""
