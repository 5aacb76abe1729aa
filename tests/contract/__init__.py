"""The chapters of the transport contract; ``tests.contract.transports`` joins them."""
