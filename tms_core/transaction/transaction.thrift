/*
 * The interface of Tephra's transaction service, written from its field numbers.
 * Framed transport, binary protocol; ids are pointers as in docs/reference/formats/tephra.md.
 */
namespace java org.apache.tephra.distributed.thrift
namespace py tms_transactions

enum TTransactionType { SHORT = 1, LONG = 2 }

enum TVisibilityLevel { SNAPSHOT = 1, SNAPSHOT_EXCLUDE_CURRENT = 2, SNAPSHOT_ALL = 3 }

struct TTransaction {
  1: i64 transactionId,
  2: i64 readPointer,
  3: list<i64> invalids,
  4: list<i64> inProgress,
  5: i64 firstShort,
  6: TTransactionType type,
  7: i64 writePointer,
  8: list<i64> checkpointWritePointers,
  9: TVisibilityLevel visibilityLevel
}

struct TBoolean { 1: bool value }

exception TTransactionNotInProgressException { 1: string message }

exception TTransactionConflictException {
  1: i64 transactionId,
  2: string conflictingKey,
  3: string conflictingClient
}

exception TTransactionCouldNotTakeSnapshotException { 1: string message }

exception TInvalidTruncateTimeException { 1: string message }

exception TGenericException {
  1: string message,
  2: string originalExceptionClass
}

/* Not in Tephra: who holds the transactions in progress, two lists of the same length. */
struct TClients {
  1: list<i64> transactionIds,
  2: list<string> clientIds
}

/* Not in Tephra: where transactions in progress have published, three lists of the same length. */
struct TTopics {
  1: list<i64> transactionIds,
  2: list<string> topics,
  3: list<i64> firstPublishMs
}

/* Not in Tephra: the write pointers of a transaction, the present one first in use and those of all checkpoints. */
struct TPointers {
  1: i64 writePointer,
  2: list<i64> checkpointWritePointers
}

service TTransactionServer {
  TTransaction startLong(),
  TTransaction startShort(),
  TTransaction startLongClientId(1: string clientId) throws (1: TGenericException e),
  TTransaction startShortTimeout(1: i32 timeout),
  TTransaction startShortClientId(1: string clientId) throws (1: TGenericException e),
  TTransaction startShortWithClientIdAndTimeOut(1: string clientId, 2: i32 timeout) throws (1: TGenericException e),
  TTransaction startShortWithTimeout(1: i32 timeout) throws (1: TGenericException e),
  TBoolean canCommitTx(1: TTransaction tx, 2: set<binary> changes) throws (1: TTransactionNotInProgressException e),
  void canCommitOrThrow(1: i64 tx, 2: set<binary> changes) throws (
    1: TTransactionNotInProgressException e, 2: TTransactionConflictException c, 3: TGenericException g),
  TBoolean commitTx(1: TTransaction tx) throws (1: TTransactionNotInProgressException e),
  void commitOrThrow(1: i64 txId, 2: i64 wp) throws (
    1: TTransactionNotInProgressException e, 2: TTransactionConflictException c, 3: TGenericException g),
  /* Not in Tephra: commits, and begins another one that sees it. */
  TTransaction commitAndStart(1: i64 txId, 2: string clientId, 3: optional i32 timeout) throws (
    1: TTransactionNotInProgressException e, 2: TTransactionConflictException c, 3: TGenericException g),
  void abortTx(1: TTransaction tx),
  /* Not in Tephra: by its id, without the lists that it carries. */
  void abortById(1: i64 txId, 2: TTransactionType type, 3: list<i64> checkpointWritePointers),
  bool invalidateTx(1: i64 txid),
  binary getSnapshot() throws (1: TTransactionCouldNotTakeSnapshotException e),
  void resetState(),
  string status(),
  TBoolean truncateInvalidTx(1: set<i64> txns),
  TBoolean truncateInvalidTxBefore(1: i64 time) throws (1: TInvalidTruncateTimeException e),
  i32 invalidTxSize(),
  TTransaction checkpoint(1: TTransaction tx) throws (1: TTransactionNotInProgressException e),
  /* Not in Tephra: by its id, without the lists that it carries. */
  TPointers checkpointById(1: i64 txId) throws (1: TTransactionNotInProgressException e),
  void pruneNow(),
  TClients inProgressClients(),
  TTopics inProgressTopics()
}
