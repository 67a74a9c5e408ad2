"""The step of the streamed strategy as data: what is done, where, after what. Pure; no torch.

`build` turns (StreamPlan, StepShape) into a Schedule, the engine executes that list with streams and events, `simulate` walks
the same list with rates. Order and memory cannot drift apart, because there is one list.
"""
