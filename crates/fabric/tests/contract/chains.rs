//! Chains and fan-outs.

use cyclone_fabric::{
    Access, ChainId, ChainOperation, ChainShape, Event, FabricError, FailureKind,
};

use crate::group::{Group, pattern};

/// Keys of the members 1.. and a chain of endpoint 0 over them.
fn open_chain(group: &mut Group, shape: ChainShape) -> ChainId {
    let members: Vec<_> = (1..group.endpoints.len())
        .map(|member| {
            let key = group.register(member, Access::ALL);
            (group.connect(0, member), key)
        })
        .collect();
    let chain = group.endpoints[0].open_chain(shape, &members);
    chain.expect("chain")
}

pub fn chains_write_copy_and_flush(group: &mut Group, shape: ChainShape) {
    let chain = open_chain(group, shape);
    let bytes = pattern(500, 5);
    let operations = [
        ChainOperation::Write {
            offset: 100,
            bytes: &bytes,
        },
        ChainOperation::Copy {
            from: 100,
            to: 2_003,
            len: 500,
        },
        ChainOperation::Write {
            offset: 100,
            bytes: &[9; 40],
        },
        ChainOperation::Flush,
    ];
    for (context, operation) in operations.into_iter().enumerate() {
        let posted = group.endpoints[0].post_chain(chain, operation, context as u64);
        posted.expect("post");
    }
    for context in 0..operations.len() as u64 {
        // In order of posting.
        let next = group.until(0, |event| match event {
            Event::ChainCompleted { context, .. } => Some(*context),
            _ => None,
        });
        assert_eq!(next, context);
    }
    for endpoint in &group.endpoints[1..] {
        let memory = endpoint.memory();
        assert_eq!(memory.read_vec(4096 + 2_003, 500), bytes);
        assert_eq!(memory.read_vec(4096 + 100, 40), [9; 40]);
        assert_eq!(memory.read_vec(4096 + 140, 460), bytes[40..]);
    }
}

pub fn chains_exchange_where_told(group: &mut Group, shape: ChainShape) {
    let chain = open_chain(group, shape);
    let swap = |old, new, execute| ChainOperation::CompareSwap {
        offset: 16,
        old,
        new,
        execute,
    };
    let mut ask = |operation| {
        let posted = group.endpoints[0].post_chain(chain, operation, 5);
        posted.expect("post");
        group.chain_outcome(0, 5).expect("swap")
    };
    assert_eq!(ask(swap(0, 8, 0b101)), [0, 0, 0]);
    assert_eq!(ask(swap(0, 9, 0b110)), [0, 0, 8]);
    assert_eq!(ask(swap(1, 1, 0b111)), [8, 9, 8]);
    for (member, held) in [(1, 8), (2, 9), (3, 8)] {
        let memory = group.endpoints[member].memory();
        assert_eq!(memory.load_u64(4096 + 16), held);
    }
}

pub fn a_refused_chain_operation_ends_the_chain(group: &mut Group) {
    let chain = open_chain(group, ChainShape::Chain);
    let beyond = ChainOperation::Write {
        offset: 8190,
        bytes: &[1; 64],
    };
    let posted = group.endpoints[0].post_chain(chain, beyond, 1);
    posted.expect("post");
    assert_eq!(group.chain_outcome(0, 1), Err(FailureKind::OutOfBounds));
    match group.endpoints[0].post_chain(chain, ChainOperation::Flush, 2) {
        Ok(()) => assert_eq!(group.chain_outcome(0, 2), Err(FailureKind::Broken)),
        Err(FabricError::Unknown(_)) => {}
        Err(error) => panic!("{error}"),
    }
    let unknown = ChainId(1 << 40);
    let refused = group.endpoints[0].post_chain(unknown, ChainOperation::Flush, 3);
    assert!(matches!(refused, Err(FabricError::Unknown(_))));
}
