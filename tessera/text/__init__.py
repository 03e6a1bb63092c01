"""Text encoders behind one interface: captions in, states, mask and pooled vector out."""
