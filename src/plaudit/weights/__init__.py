"""How new weights reach samplers that hold a copy of their own."""
