package interop;

import co.cask.cdap.api.dataset.lib.CloseableIterator;
import co.cask.cdap.api.messaging.TopicNotFoundException;
import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.common.conf.Constants.MessagingSystem;
import co.cask.cdap.common.utils.TimeProvider;
import co.cask.cdap.messaging.MessagingService;
import co.cask.cdap.messaging.TopicMetadata;
import co.cask.cdap.messaging.data.MessageId;
import co.cask.cdap.messaging.data.RawMessage;
import co.cask.cdap.messaging.service.MessagingServices;
import co.cask.cdap.messaging.store.MessageTable;
import co.cask.cdap.messaging.store.PayloadTable;
import co.cask.cdap.messaging.store.leveldb.LevelDbStore;
import co.cask.cdap.proto.id.TopicId;
import java.io.IOException;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.tephra.Transaction;
import org.apache.tephra.util.TxUtils;
import org.iq80.leveldb.DBIterator;

/** The commands that read a store through tables, raw rows, or CDAP's service. */
final class Reading {
  /** A position before every payload of a transaction, so that a fetch from it returns them all. */
  private static final MessageId FIRST_PAYLOAD = new MessageId(new byte[MessageId.RAW_ID_SIZE]);

  private Reading() {
  }

  /** Prints every topic, and every entry of live topics through the table classes, which apply no ttl. */
  static void dump(Arguments args, Output out) throws IOException {
    CConfiguration conf = Main.configuration(args.word(0));
    try (Store store = Store.open(conf, args.word(0))) {
      MessageTable messages = store.createMessageTable(conf.get(MessagingSystem.MESSAGE_TABLE_NAME));
      PayloadTable payloads = store.createPayloadTable(conf.get(MessagingSystem.PAYLOAD_TABLE_NAME));
      List<TopicMetadata> topics = store.topics();
      for (TopicMetadata topic : topics) {
        out.line("kind", "topic", "topic", name(topic.getTopicId()), "generation", topic.getGeneration(),
            "ttl_seconds", topic.getTTL(), "properties", topic.getProperties());
      }
      for (TopicMetadata topic : topics) {
        if (topic.exists()) {
          dumpMessages(topic, messages, payloads, out);
        }
      }
    }
  }

  private static void dumpMessages(TopicMetadata topic, MessageTable messages, PayloadTable payloads, Output out)
      throws IOException {
    try (CloseableIterator<MessageTable.Entry> entries = messages.fetch(topic, 0L, Integer.MAX_VALUE, null)) {
      while (entries.hasNext()) {
        MessageTable.Entry entry = entries.next();
        out.line("kind", "message", "topic", name(entry.getTopicId()), "generation", entry.getGeneration(),
            "publish_ms", entry.getPublishTimestamp(), "seq", Short.toUnsignedInt(entry.getSequenceId()),
            "transactional", entry.isTransactional(), "pointer", entry.getTransactionWritePointer(),
            "payload_sha256", entry.isPayloadReference() ? null : Output.sha256(entry.getPayload()),
            "payloads", entry.isPayloadReference() ? stored(topic, entry, payloads) : null);
      }
    }
  }

  /** Returns the rows of the payload table of a reference. */
  private static List<Map<String, Object>> stored(TopicMetadata topic, MessageTable.Entry reference,
      PayloadTable payloads) throws IOException {
    List<Map<String, Object>> rows = new ArrayList<>();
    try (CloseableIterator<PayloadTable.Entry> entries = payloads.fetch(
        topic, reference.getTransactionWritePointer(), FIRST_PAYLOAD, true, Integer.MAX_VALUE)) {
      while (entries.hasNext()) {
        PayloadTable.Entry entry = entries.next();
        rows.add(Output.map("write_ms", entry.getPayloadWriteTimestamp(),
            "seq", Short.toUnsignedInt(entry.getPayloadSequenceId()), "sha256", Output.sha256(entry.getPayload())));
      }
    }
    return rows;
  }

  /** Prints every row of a table, also unrecognized ones, read by CDAP's LevelDB library with CDAP's options. */
  static void raw(Arguments args, Output out) throws IOException {
    try (LevelDbStore store = new LevelDbStore(Main.configuration(args.word(0)));
        DBIterator rows = store.database(args.word(1)).iterator()) {
      for (rows.seekToFirst(); rows.hasNext();) {
        Map.Entry<byte[], byte[]> row = rows.next();
        out.line("key", Output.hex(row.getKey()), "value_sha256", Output.sha256(row.getValue()));
      }
    }
  }

  /** Prints the messages of a consumer: without a transaction, and in a transaction that began at the snapshot. */
  static void service(Arguments args, Output out) throws IOException, TopicNotFoundException {
    CConfiguration conf = Main.configuration(args.word(0));
    String snapshot = args.text("--snapshot", null);
    Transaction transaction =
        snapshot == null ? null : TxUtils.createDummyTransaction(Snapshots.read(Path.of(snapshot)));
    try (Store store = Store.open(conf, args.word(0))) {
      MessagingService service = MessagingServices.create(conf, store, TimeProvider.SYSTEM_TIME);
      for (TopicMetadata topic : store.topics()) {
        if (topic.exists()) {
          consume(service, topic.getTopicId(), null, args.has("--messages"), out);
          if (transaction != null) {
            consume(service, topic.getTopicId(), transaction, args.has("--messages"), out);
          }
        }
      }
    }
  }

  private static void consume(MessagingService service, TopicId topic, Transaction transaction, boolean list,
      Output out) throws IOException, TopicNotFoundException {
    MessageDigest digest = Output.sha256();
    long count = 0;
    try (CloseableIterator<RawMessage> messages =
        service.prepareFetch(topic).setTransaction(transaction).setLimit(Integer.MAX_VALUE).fetch()) {
      while (messages.hasNext()) {
        RawMessage message = messages.next();
        digest.update(message.getId());
        digest.update(message.getPayload());
        count++;
        if (list) {
          out.line("kind", "message", "topic", name(topic), "in_transaction", transaction != null,
              "id", Output.hex(message.getId()), "payload_sha256", Output.sha256(message.getPayload()));
        }
      }
    }
    out.line("kind", "topic", "topic", name(topic), "in_transaction", transaction != null, "messages", count,
        "sha256", Output.hex(digest.digest()));
  }

  static String name(TopicId topic) {
    return topic.getNamespace() + ":" + topic.getTopic();
  }
}
