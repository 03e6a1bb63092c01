"""Pictures and captions as vectors that meet: a pair trained here, contrastively, or a CLIP model from the user's disk."""
