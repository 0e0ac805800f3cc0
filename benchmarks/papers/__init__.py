"""What the SwiftSpec and SpecServe papers print, beside what the simulator says of the same."""
