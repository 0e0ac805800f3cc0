"""What the SwiftSpec and SpecServe papers print and leave open, beside what the simulator says."""
