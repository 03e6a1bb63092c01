"""The engine: trains any stage, knows no model. Route of one batch: loop -> step -> the stage's loss -> step -> chores."""
