"""What the code gave at a point in time, stored so that a restructuring can be compared with it to the last bit."""
